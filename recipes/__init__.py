"""How the bundled models were made: data, tokenizer, training, distillation and measurements (see README.md)."""
