#!/bin/sh
# bundle.sh - writes the files that the program carries inside: "SIZE MODE PATH" and a newline, then the file, one after
# the other. Skills are written as they are installed: a line `cut PATH NAME` of a code block is replaced by the
# definition of NAME in that file, with the comment above it, and the scripts that a skill lists are among its files.
#   bundle.sh FOLDER-FOR-WORK FILE ...   to standard output; skills/ is added to the files
set -eu
work=$1
shift

put() { # path in the bundle, file
    mode=-
    [ ! -x "$2" ] || mode=x
    printf '%s %s %s\n' "$(($(wc -c <"$2")))" "$mode" "$1"
    cat "$2"
}
cut_in() { # a skill's file, with the definitions that it cuts from sources
    awk '
    function cut(path, name,    line, n, from, to) {
        n = 0
        while ((getline line < path) > 0)
            of[++n] = line
        close(path)
        for (from = 1; from <= n; from++)
            if (of[from] !~ /^[ \/#*]/ && of[from] ~ ("(^|[^A-Za-z_0-9])" name "($|[^A-Za-z_0-9])"))
                break
        if (from > n) {
            print FILENAME ": " path " has no " name > "/dev/stderr"
            exit 1
        }
        for (to = from; to < n && of[to] !~ /^(\};?|}.*;)$/ && !(to == from && of[to] ~ /;$/); to++)
            ;
        while (from > 1 && of[from - 1] ~ /^(template|\/\*|   [^ ]|#pragma)/)
            from--
        for (; from <= to; from++)
            print of[from]
    }
    $1 == "cut" && NF == 3 { if (after) print ""; cut($2, $3); after = 1; next }
    { print; after = 0 }' "$1"
}

for file; do put "$file" "$file"; done
for file in $(find skills -type f ! -name scripts.list | LC_ALL=C sort); do
    cut_in "$file" >"$work/bundle.part"
    put "$file" "$work/bundle.part"
done
for list in skills/*/scripts.list; do
    while read -r file; do put "${list%/*}/scripts/${file##*/}" "$file"; done <"$list"
done
rm -f "$work/bundle.part"
