"""Probes and checks of a program before its first step."""
