"""What a model is written with: Param, Context, the contract, attention, mixtures of experts, matrix products."""
