/* json.c - members of a JSON object by their names, without a JSON library. */
#include "json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The text after `"name": "` up to the next quote. */
int adze_json_text(const char *json, const char *name, char *to, size_t size)
{
    char key[64];
    snprintf(key, sizeof key, "\"%s\": \"", name);
    const char *at = strstr(json, key);
    if (!at)
        return 0;
    at += strlen(key);
    snprintf(to, size, "%.*s", (int)strcspn(at, "\""), at);
    return at[strcspn(at, "\"")] == '"';
}

int adze_json_number(const char *json, const char *name, double *to)
{
    char key[64], *end;
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = strstr(json, key);
    if (!at)
        return 0;
    *to = strtod(at + strlen(key), &end);
    return end > at + strlen(key) && isfinite(*to) && *to >= 0;
}
