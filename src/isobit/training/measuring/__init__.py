"""What is counted, timed and compared while a step goes on."""
