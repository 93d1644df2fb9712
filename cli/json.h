/* json.h - members of a JSON object by their names, in text that this project wrote: `"name": value`. */
#ifndef ADZE_CLI_JSON_H
#define ADZE_CLI_JSON_H

#include <stddef.h>

/* The text or the number of the first member of this name; 0 when there is none, or it is damaged. */
int adze_json_text(const char *json, const char *name, char *to, size_t size);
int adze_json_number(const char *json, const char *name, double *to);

#endif
