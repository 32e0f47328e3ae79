"""What programs written for other runtimes ask for, answered by hmp; the core does without all of it."""
