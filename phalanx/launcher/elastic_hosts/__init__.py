"""The hosts of an elastic job: discovered, connected, filled with workers, blacklisted, withdrawn."""
