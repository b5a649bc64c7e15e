"""What a stage's time is made of: operator times, measured or analytic, composed to that of a micro-batch."""
