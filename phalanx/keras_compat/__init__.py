"""The only home of `keras.src` imports and of patches to Keras."""
