"""The commands of the laboratory, which the command `gradwire` finds as entry points."""
