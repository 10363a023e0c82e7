"""Building blocks of models: Param, Context, the model contract, attention, mixtures of experts, matrix products."""
