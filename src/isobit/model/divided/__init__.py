"""A model that several ranks hold together: each keeps some output rows of every weight."""
