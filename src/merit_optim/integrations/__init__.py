"""Integrations with training libraries. Each module needs the library it is named for."""
