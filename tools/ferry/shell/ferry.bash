# Completion of `ferry` for bash: commands and options as --help prints them.
_ferry() {
  local word=${COMP_WORDS[COMP_CWORD]} command='' words='' i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    [[ ${COMP_WORDS[i]} == -- ]] && return # the program of `ferry run`: files
    [[ -z $command && ${COMP_WORDS[i]} != -* ]] && command=${COMP_WORDS[i]}
  done
  if [[ $word == -* ]]; then
    words=$("${COMP_WORDS[0]}" ${command:+"$command"} --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]*')
  elif [[ -z $command ]]; then
    words=$("${COMP_WORDS[0]}" --help 2>/dev/null | sed -nE '/^SUBCOMMANDS|^Subcommands/,$s/^  ([a-z]+) .*/\1/p')
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word" | sort -u)
}
complete -o default -F _ferry ferry
