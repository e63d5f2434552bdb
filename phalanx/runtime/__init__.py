"""Code that runs inside every worker process: bootstrap, progress, heartbeat, exit codes, crash reports."""
