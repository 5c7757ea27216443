"""Mutation testing: small changes of the code that ranks rest on, and how many of them the tests notice."""
