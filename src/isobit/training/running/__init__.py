"""What every open run has, whatever it learns from: its directory, its end, and how one goes on."""
