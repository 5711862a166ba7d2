#!/usr/bin/env bash
# Debian packages of the command and of the C++ library, from the files that git knows, into dist/.
#   tools/debian/make.sh
# Needs what Build-Depends of `control` lists; says what is missing. What it builds lies in build/deb.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
number() { sed -n "s/^#define FERRY_VERSION_$1 //p" include/ferry/version.hpp; }
version=$(number MAJOR).$(number MINOR).$(number PATCH)
source=build/deb/ferry-moe-$version
rm -rf build/deb
mkdir -p "$source" dist
git ls-files -z -- . ':!tools/debian' | xargs -0 cp --parents -t "$source"
cp -r tools/debian "$source/debian"
rm "$source/debian/make.sh"
cat >"$source/debian/changelog" <<END
ferry-moe ($version) unstable; urgency=medium

  * See CHANGELOG.md.

 -- The Ferry authors <ferry@localhost.invalid>  $(git log -1 --format=%cD)
END
(cd "$source" && dpkg-buildpackage --build=binary --no-sign)
rm -f dist/*ferry-moe*.deb
find build/deb -maxdepth 1 -name "*.deb" -not -name "*-dbgsym_*" -exec cp -t dist {} +
ls -l dist/*.deb
