"""Studies: questions that training runs answer, and the code that trains those runs."""
