"""Training on several ranks with the words of one."""
