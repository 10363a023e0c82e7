"""What is done with a trained model: text generation, questions with answers, evaluation, prediction."""
