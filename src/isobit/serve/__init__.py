"""A server over one model: OpenAI's routes. `INSTALLED_BY` brings what it needs beyond isobit."""

INSTALLED_BY = "pip install starlette uvicorn prometheus-client"
"""The packages of the extra `serve`, by their own names: isobit's is not on PyPI."""
