"""What a run compiles: the recipe's model, data, optimizer and mesh put together; `dtrain plan` compiles the same."""
