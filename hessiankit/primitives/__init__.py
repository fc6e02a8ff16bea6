"""Operations as primitives: value, push, pull and second derivative of each along directions."""
