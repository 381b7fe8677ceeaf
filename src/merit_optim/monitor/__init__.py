"""What attention and updates do in a model of any kind. Depends on torch alone."""
