"""What scripts/make_site.py makes the pages of the site from."""
