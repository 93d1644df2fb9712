/* html.c - the page of `adze bench --html`. */
#include "html.h"

int adze_html_write(const adze_report *r, const char *path)
{
    FILE *f = fopen(path, "w");
    (void)r;
    return f && fclose(f) == 0;
}
