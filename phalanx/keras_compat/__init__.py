"""Everything that depends on the internals of Keras: `keras.src` imports and patches are only here.

Each module names the versions of Keras with which it was tested. For each patch and each internal in use,
`tests/keras_compat` has a test that fails when Keras changes it. This package is below the engines and the training
loops and imports neither: they register callbacks for what they need (see `trainer_hook`).
"""
