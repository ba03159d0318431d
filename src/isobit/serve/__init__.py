"""A server over one model: OpenAI's routes. `isobit[serve]` brings what it needs beyond isobit."""
