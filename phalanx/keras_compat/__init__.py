"""Everything that depends on how Keras works inside: `keras.src` imports and patches are only here.

Each module names the versions of Keras with which it was tested. For each patch and each internal that is used,
`tests/keras_compat` has a test that fails when Keras changes it. This package is below the engines and the training
loops and imports neither: they register what they need to hear of (see `trainer_hook`).
"""
