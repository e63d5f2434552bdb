"""The hosts of workers: this host, or another one through ssh."""
