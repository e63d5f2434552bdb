"""Programs that use the interface the way Horovod's own parallel tests do: one module for each framework.

Each function whose name begins with `check_` is a case. All ranks of a job call it, one case after the other; a failure
is an AssertionError on any rank.
"""
