"""How a run is opened, new or resumed, and what an open one consists of."""
