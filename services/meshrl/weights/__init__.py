"""The weight plane: new weights travel from the trainer to every engine as one transaction of the fleet."""
