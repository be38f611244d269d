"""Transitional: old-style views."""

from dlbench.views.old_view import Sheet as Sheet
from dlbench.views.old_view import View as View
