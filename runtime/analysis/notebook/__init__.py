"""The Python and notebook API of run folders: numpy tables, data frames and figures."""
