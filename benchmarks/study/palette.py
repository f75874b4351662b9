"""Colours of the study's figures, mostly Okabe and Ito's."""

COLORS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "grey": "#767676",
    "sky": "#56b4e9",
    "vermillion": "#d55e00",
    "ink": "#1a1a1a",
    "green": "#009e73",
    "pink": "#cc79a7",
    "purple": "#6a51a3",
    "brown": "#8c6d31",
    "teal": "#1b7f8c",
}
