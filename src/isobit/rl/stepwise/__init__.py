"""A learner that another program's loop drives, call by call: it takes sequences with what a loss
needs of them, returns log-probabilities, and adds gradients up until a step is asked for."""

from isobit.rl.stepwise.data import Datum
from isobit.rl.stepwise.learner import Adam, Outputs, Parts, StepwiseLearner

__all__ = ["Adam", "Datum", "Outputs", "Parts", "StepwiseLearner"]
