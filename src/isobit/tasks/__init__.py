"""What a run is about: prompts, rewards and environments, and the processes that run a user's code."""
