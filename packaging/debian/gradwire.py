#!/usr/bin/python3
"""The command gradwire."""

from gradwire.cli import main

main()
