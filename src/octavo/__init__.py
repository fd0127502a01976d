"""Octavo: serve transformers to many users from little memory."""
