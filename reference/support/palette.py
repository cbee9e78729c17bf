"""The project's colours: one for each tensor and each format, in the report, the lessons, the site and the drawings.

They are Okabe's and Ito's, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/). A format has
the colour of the tensor that it mostly holds. A style sheet cannot import them; tests/pages/test_palette.py compares.
"""

BLUE, ORANGE, GREEN, PURPLE, RED = "#56b4e9", "#e69f00", "#2fb58c", "#cc79a7", "#d55e00"
YELLOW, DARK_BLUE, DARK_GREEN = "#f0e442", "#0072b2", "#00714f"

X, W, Y, GRAD = BLUE, ORANGE, GREEN, PURPLE  # input, weight, output, gradients
E4M3, E5M2, E2M1, E8M0 = BLUE, PURPLE, ORANGE, GREEN
WRONG, RIGHT = RED, DARK_GREEN  # a wrong word, a bit that is cut off, a warning; a verdict

INK, LABEL = "#101418", "#5b6876"  # text and lines; text beside them
GREY, PALE = "#b9c0c8", "#dfe3e8"  # what is no tensor
MIDDLE = "#737b85"  # text that is legible on white and on black
BF16, FP32, FP8 = INK, LABEL, RED  # FP8: a run in which formats are mixed
SIGN, EXPONENT, MANTISSA = GREY, PALE, YELLOW  # a code's fields
