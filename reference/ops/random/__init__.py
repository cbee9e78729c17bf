"""Ops that draw random numbers: dropout, and the normal distribution of first weights."""
