"""A learner that somebody else's loop drives, call by call: sequences with what a loss needs of
them in, log-probabilities out, gradients that add up until a step is asked for."""

from isobit.rl.stepwise.data import Datum
from isobit.rl.stepwise.learner import Adam, Outputs, Parts, StepwiseLearner

__all__ = ["Adam", "Datum", "Outputs", "Parts", "StepwiseLearner"]
