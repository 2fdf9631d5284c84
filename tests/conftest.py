"""This folder is on the import path because it holds a conftest: every test imports ``_fixtures``."""
