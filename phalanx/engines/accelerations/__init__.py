"""Optional faster implementations. Each is measured, and each can be switched off by name."""
