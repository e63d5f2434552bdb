"""The hosts of an elastic job: discovery, connections, slots, blacklist, withdrawal."""
