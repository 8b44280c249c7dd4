"""What learns: the student, its texts, the gate, and the trainers, in the process that serves or in one of its own."""
