"""Import path of the modules that Horovod shares among frameworks, for programs that import them from there."""
