"""The reports of trainings as a web page: one file, with its library, that needs no network."""

from gradwire_lab.train.page.html_file import check, write

__all__ = ["check", "write"]
