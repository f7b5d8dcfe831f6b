// Shell completion, generated from the application itself, so that it knows every option that exists.
#include <fmt/format.h>

#include "tools/cli.h"

namespace gatefold::cli {
namespace {

/// What may follow an option: a list of words, a file, or a directory; from the type name in --help.
std::string words_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  if (type.find("SCHEME") != std::string::npos) {
    std::string words;
    for (const Scheme& scheme : all_schemes()) words += fmt::format("{} ", scheme.name);
    return words;
  }
  const std::size_t open = type.find('{'), close = type.find('}');
  if (open == std::string::npos || close == std::string::npos) return {};
  std::string words = type.substr(open + 1, close - open - 1);
  for (char& c : words)
    if (c == ',') c = ' ';
  return words;
}
bool takes_directory(const CLI::Option& option) {
  return option.get_type_name().find("DIR") != std::string::npos;
}
bool takes_file(const CLI::Option& option) {
  return option.get_type_name().find("FILE") != std::string::npos;
}

struct Command {
  std::string name, description;
  std::vector<const CLI::Option*> options;  ///< of the command and of all commands, positionals left out
  bool directory_argument = false;
  std::string argument_words;
};

/// Option groups are applications without a name within the subcommand's.
void collect(const CLI::App& app, Command& command) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_positional()) {
      command.directory_argument |= takes_directory(*option);
      command.argument_words += words_of(*option);
    } else if (!app.get_name().empty() || !option->check_lname("help")) {
      command.options.push_back(option);
    }
  }
  for (const CLI::App* group :
       app.get_subcommands([](const CLI::App* sub) { return sub->get_name().empty(); }))
    collect(*group, command);
}

std::vector<Command> commands(const CLI::App& app) {
  std::vector<Command> result;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    Command command{sub->get_name(), sub->get_description(), {}, false, {}};
    collect(*sub, command);
    for (const CLI::Option* option : app.get_options())
      if (!option->check_lname("help") && !option->check_lname("version")) command.options.push_back(option);
    result.push_back(std::move(command));
  }
  return result;
}

std::vector<std::string> spellings(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

std::string bash(const std::vector<Command>& all) {
  std::string names, options, values;
  for (const Command& command : all) {
    names += command.name + " ";
    std::string own = command.argument_words;
    for (const CLI::Option* option : command.options) {
      const auto spelled = spellings(*option);
      own += fmt::format("{} ", fmt::join(spelled, " "));
      if (option->get_items_expected_max() == 0) continue;
      const std::string words = words_of(*option);
      values +=
          fmt::format("    {}:{}) ", command.name, fmt::join(spelled, fmt::format("|{}:", command.name)));
      const std::string reply = !words.empty()             ? fmt::format("-W '{}'", words)
                                : takes_directory(*option) ? "-d"
                                : takes_file(*option)      ? "-f"
                                                           : "-W ''";
      values += fmt::format("COMPREPLY=($(compgen {} -- \"$cur\")) ;;\n", reply);
    }
    options += fmt::format("    {}) words='{}' files={} ;;\n", command.name, own,
                           command.directory_argument ? "-d" : "-f");
  }
  return fmt::format(R"(# bash completion for gatefold
_gatefold() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}} words files
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '{} --help --version' -- "$cur"))
    return
  fi
  case "$command:$prev" in
{}    *)
      case "$command" in
{}      esac
      COMPREPLY=($(compgen -W "$words" -- "$cur"))
      [[ $cur == -* ]] || COMPREPLY+=($(compgen ${{files:--f}} -- "$cur")) ;;
  esac
}}
complete -o filenames -F _gatefold gatefold
)",
                     names, values, options);
}

/// Quotes for zsh's _arguments: [] and : are its own, ' is the shell's.
std::string quoted(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':') result += '\\';
    result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return result;
}

std::string zsh(const std::vector<Command>& all) {
  std::string names, cases;
  for (const Command& command : all) {
    names += fmt::format("    '{}:{}'\n", command.name, quoted(command.description));
    cases += fmt::format("    {}) _arguments", command.name);
    for (const CLI::Option* option : command.options) {
      const std::string words = words_of(*option);
      std::string value;
      if (option->get_items_expected_max() > 0)
        value = !words.empty()             ? fmt::format(":value:({})", words)
                : takes_directory(*option) ? ":value:_files -/"
                : takes_file(*option)      ? ":value:_files"
                                           : ":value:";
      for (const std::string& name : spellings(*option))
        cases += fmt::format(" \\\n      '{}[{}]{}'", name, quoted(option->get_description()), value);
    }
    cases += command.argument_words.empty()
                 ? fmt::format(" \\\n      '*:argument:_files{}'", command.directory_argument ? " -/" : "")
                 : fmt::format(" \\\n      '*:argument:({})'", command.argument_words);
    cases += " ;;\n";
  }
  return fmt::format(R"(#compdef gatefold
_gatefold() {{
  local -a commands=(
{}  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  local command=$words[2]
  shift words
  ((CURRENT--))
  case $command in
{}  esac
}}
_gatefold "$@"
)",
                     names, cases);
}

std::string fish(const std::vector<Command>& all) {
  std::string script = "complete -c gatefold -f\n";
  const auto escaped = [](const std::string& text) {
    std::string result;
    for (const char c : text) result += c == '\'' ? std::string("\\'") : std::string(1, c);
    return result;
  };
  for (const Command& command : all) {
    script += fmt::format("complete -c gatefold -n __fish_use_subcommand -a {} -d '{}'\n", command.name,
                          escaped(command.description));
    const std::string when =
        fmt::format("complete -c gatefold -n '__fish_seen_subcommand_from {}'", command.name);
    if (!command.argument_words.empty())
      script += fmt::format("{} -a '{}'\n", when, command.argument_words);
    else if (command.directory_argument)
      script += fmt::format("{} -a '(__fish_complete_directories)'\n", when);
    for (const CLI::Option* option : command.options) {
      script += when;
      for (const std::string& name : option->get_snames()) script += " -s " + name;
      for (const std::string& name : option->get_lnames()) script += " -l " + name;
      if (option->get_items_expected_max() > 0) {
        const std::string words = words_of(*option);
        script += !words.empty() ? fmt::format(" -x -a '{}'", words) : takes_file(*option) ? " -r -F" : " -x";
      }
      script += fmt::format(" -d '{}'\n", escaped(option->get_description()));
    }
  }
  return script;
}

}  // namespace

void add_completion(Cli& cli) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = cli.add("completion", "Print a completion script", [shell, &cli](Json* json) -> Status {
    const auto all = commands(cli.app());
    const std::string script = *shell == "bash" ? bash(all) : *shell == "zsh" ? zsh(all) : fish(all);
    if (json != nullptr)
      *json = {{"shell", *shell}, {"script", script}};
    else
      fmt::print("{}", script);
    return {};
  });
  command->add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
}

}  // namespace gatefold::cli
