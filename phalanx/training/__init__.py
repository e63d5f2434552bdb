"""Training of Keras models under a strategy: the hook, the loops, the merge of a step."""
