"""Where workers run: this host, or another one through ssh."""
