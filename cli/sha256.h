/* sha256.h - the SHA-256 of a text, as sha256sum prints it. */
#ifndef ADZE_CLI_SHA256_H
#define ADZE_CLI_SHA256_H

#include <stddef.h>

enum { SHA256_TEXT = 65 };
void adze_sha256(const char *data, size_t size, char text[SHA256_TEXT]);

#endif
